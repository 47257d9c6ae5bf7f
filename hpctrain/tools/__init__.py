"""Commands apart from training: doctor, bench and the Horovod build."""
