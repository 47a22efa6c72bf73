"""The schedules that come with pipegrad. Each is a plug-in."""
