"""How ranks find each other and meet: jobs of MPI, Slurm, SageMaker and AzureML (`jobs`), and the
store at which ranks compare notes before they start (`meeting`). Nothing here loads torch when it
is imported."""
