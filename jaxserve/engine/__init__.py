"""The engine, in the order a request meets it: scheduler, page pool and prefix cache, batch, runner, step."""
