"""Cache policies for agents: what a request for the next turn says, what it costs, and replays of recorded trajectories."""
