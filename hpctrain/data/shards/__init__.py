"""Image sets on disk, in folders or tar files: find, read, write. It never imports torch."""
