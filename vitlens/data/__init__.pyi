from .imageset import ImageSet, ImageStream, Samples, load
from .sources import SOURCES, register
