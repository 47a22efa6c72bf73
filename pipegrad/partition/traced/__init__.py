"""How is the graph of torch.export cut into stages?"""
