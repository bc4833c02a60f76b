"""A cluster of inference servers, simulated on a virtual clock: every replica runs the course's own
scheduler and block manager, and only the model is replaced by a formula for the time of a step.

    from reference.simulator.costs import new_deployment
    from reference.simulator.plan import gpus_needed
    from reference.simulator.policies import Policy, simulate
    from reference.simulator.served import Slo
    from reference.simulator.traces import poisson

    trace, deployment = poisson("rate=8"), new_deployment("llama-3-8b", "h100")
    # served.ttft_s, served.itl_s
    served = simulate(trace, deployment, Policy("chunked"), replicas=2)
    gpus_needed(trace, deployment, Policy("chunked"), Slo(ttft_s=0.5, itl_s=0.05)).gpus

Read replica.py, then cluster.py; tiers.py and links.py are where K and V wait and travel. What is
left out: the time of routing, of the network in front of the cluster, of communication inside a
replica of several GPUs, and of loading a model. So a real cluster needs more GPUs than this one,
and differences between policies are more certain than seconds.
"""
