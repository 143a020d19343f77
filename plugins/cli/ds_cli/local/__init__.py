"""The launcher ``local``: the processes of one host, how they are watched, and what is said of a failure."""
