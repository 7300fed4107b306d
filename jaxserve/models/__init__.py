"""Model families: ArchConfig from a Hugging Face config, parameter specs, decoder block."""
