"""The edge codecs that come with pipegrad. They use only public names of pipegrad."""
