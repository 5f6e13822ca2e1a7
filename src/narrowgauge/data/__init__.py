"""Training data: the sources that ``--data`` can name, tokenizers, and the cache of what was encoded.

source.py     the interface of a data source
sources.py    the registry of data sources; opens the one that ``--data`` names
              corpus, text, tokens, documents, hub: the sources, one file each
"""
