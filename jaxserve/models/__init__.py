"""Model families: Hugging Face config -> ArchConfig, parameter rows, block."""
