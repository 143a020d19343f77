from ds_compression.apply import init_compression as init_compression
from ds_compression.clean import redundancy_clean as redundancy_clean
from ds_compression.clock import set_step as set_step
from ds_compression.student import student_initialization as student_initialization
