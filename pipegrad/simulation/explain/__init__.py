"""Where did a step go, and what would make it shorter? Of a simulated or a recorded timeline."""
