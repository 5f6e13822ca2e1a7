"""narrowgauge inside loops that other libraries run: Lightning, Accelerate, the Hugging Face Trainer.

Each library is imported when its file's functions are called, so that narrowgauge needs none of them.
"""
