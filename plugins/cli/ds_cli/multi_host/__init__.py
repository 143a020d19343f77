"""A run on several hosts: the agent of each host, how they meet, and what they decide when one fails."""
