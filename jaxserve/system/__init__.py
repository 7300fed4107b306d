"""The process and its machine: environment, files, signals, clocks."""
