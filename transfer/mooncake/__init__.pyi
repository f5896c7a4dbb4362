from .engine import MooncakeEngine as MooncakeEngine
