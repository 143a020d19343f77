"""What commands, launchers and options of ``dscore`` are written with (torch-free)."""
