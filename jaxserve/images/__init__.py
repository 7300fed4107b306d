"""Images of prompts: loaded, preprocessed and given tokens. Pure numpy and Pillow: no jax."""
