from ds_numerics.checking import NumericsError as NumericsError
from ds_numerics.trace import checksum as checksum
