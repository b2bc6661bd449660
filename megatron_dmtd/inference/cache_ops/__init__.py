"""Cache operations: hide cached tokens from later ones, and move the survivors to positions from 0 (docs/cache_operations.md)."""
