"""What a learner looks through: workloads, metrics, charts, the stage ladder. The engine never imports it."""
