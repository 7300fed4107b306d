"""Process and machine: environment, files, signals, clocks."""
