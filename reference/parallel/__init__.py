"""The engine over several processes (lesson 20): workers hold the model and its cache, in parts.

the user's process                                 a worker, one a rank
requests, scheduler, block tables,     orders      its part of the model, its part of every block
prefix cache, text                   --------->    worker.py, and the sampler
runner.py, replicas.py               <---------    where the logits are: sampling.py
                                       tokens
"""
