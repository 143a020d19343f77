from ds_sparse_gradients.rows import RowTensor as RowTensor
