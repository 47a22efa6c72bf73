"""How is a training saved, and continued in another cut?

`checkpoint` saves and loads. `layout` names locations in the mesh, `chunks` are the parts of flat
tensors, and `handler_state` has the bytes of handlers. `validate` and `checksums` refuse a wrong or
damaged checkpoint before the first step. `resume` continues a run.
"""
