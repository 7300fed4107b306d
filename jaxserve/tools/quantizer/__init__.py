"""Production of quantised checkpoints: calibration, rounding and the layout in which others read them."""
