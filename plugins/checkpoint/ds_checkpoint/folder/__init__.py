"""What lies in a checkpoint's folder, and how it comes there whole."""
