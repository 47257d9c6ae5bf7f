import horovod.torch as hvd
import torch

hvd.init()
if torch.cuda.is_available():
    torch.cuda.set_device(hvd.local_rank())
model = torch.nn.Linear(8, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
