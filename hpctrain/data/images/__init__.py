"""Images on disk: decoding, cropping, and normalization on the device."""
