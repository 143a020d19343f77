"""One forward of a model: by a program, by itself, on one rank or several."""
