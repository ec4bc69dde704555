"""From one placement to another: who sends what to whom, and how a layer switches as one."""
