from .engine import NixlEngine as NixlEngine
