"""PEFT's format: what is read, what is refused by name, and logits equal to peft's own."""



