"""What the interactive parts of the pages call: JSON in, JSON out, in the reader's browser.

A part asks one of the rooms `cost`, `paging` and `serving`; each has one function `live(request) -> reply`.
"""
