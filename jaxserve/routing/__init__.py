"""Routing: one HTTP server before many jaxserve servers, which gives each request to one of them."""
