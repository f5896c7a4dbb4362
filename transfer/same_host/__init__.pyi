from .engine import SameHostEngine as SameHostEngine
