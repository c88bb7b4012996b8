"""What saved bytes cost in quality: a frozen text, hidden facts, distances between distributions.

>>> from companion.quality import text
>>> len(text().split())
25054
"""

from .divergence import Divergence, compare
from .facts import Haystack, haystack, recall
from .frozen import text
from .results import store, stored

__all__ = ["Divergence", "Haystack", "compare", "haystack", "recall", "store", "stored", "text"]
