import torch

model = torch.nn.DataParallel(torch.nn.Linear(8, 1)).cuda()
print(model(torch.rand(64, 8, device="cuda")).mean().item())
