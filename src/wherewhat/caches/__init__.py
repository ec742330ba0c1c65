"""Running a model in which heads see a part of the text: attention under a visibility, its kernels, and caches."""
