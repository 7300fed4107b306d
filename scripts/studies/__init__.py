"""Studies of policies in virtual time, by the engine's own scheduler: see jaxserve/SIMULATOR.md."""
