"""The rows of the table, an area of DeepSpeed's names in each module."""
