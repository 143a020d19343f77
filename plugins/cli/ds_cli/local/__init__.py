"""The launcher ``local``: the processes of one host, and what is said when one fails."""
