"""K and V of requests: pages and who owns them, stores that hold them, and prefixes that requests share."""
