"""OpenAI's files and batches: uploads on disk, served by the batch runner between other requests."""
