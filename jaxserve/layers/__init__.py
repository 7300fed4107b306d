"""The small parts every decoder block is made of."""
