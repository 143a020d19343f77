"""A run on several hosts: their agents, how they meet, what they decide when one fails."""
