"""Programs beside the training: doctor, bench, and the build of Horovod."""
