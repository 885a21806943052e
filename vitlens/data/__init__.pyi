from .imageset import ImageSet, ImageStream, Samples, load
from .sources import SOURCES, register

__all__ = [
    "ImageSet",
    "ImageStream",
    "SOURCES",
    "Samples",
    "load",
    "register",
]
