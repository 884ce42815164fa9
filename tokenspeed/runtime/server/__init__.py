"""The HTTP server: OpenAI's API over one engine. Importing this package does not import the web stack."""

from tokenspeed.runtime.server.serve import serve, serve_loading
from tokenspeed.runtime.server.settings import ServerSettings

__all__ = ["ServerSettings", "serve", "serve_loading"]
