// Giving a tensor's storage other memory without a copy. Uses nothing of torch but the public parts of c10::StorageImpl.
#include <c10/core/StorageImpl.h>
#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace {

c10::StorageImpl* at(uintptr_t storage) { return reinterpret_cast<c10::StorageImpl*>(storage); }

// Called from any thread, when torch gives the memory up: drops the reference to its owner.
void drop(void* owner) {
    if (!Py_IsInitialized()) return;
    const PyGILState_STATE held = PyGILState_Ensure();
    Py_DECREF((PyObject*)owner);
    PyGILState_Release(held);
}

// Makes memory that `owner` keeps the contents of a storage, which is empty.
void put(uintptr_t storage, uintptr_t memory, size_t size, py::object owner) {
    auto* impl = at(storage);
    if (impl->nbytes() != 0 || impl->device_type() != c10::DeviceType::CPU)
        throw py::value_error("the storage must be empty, and on the CPU");
    impl->set_data_ptr_noswap(c10::DataPtr((void*)memory, owner.release().ptr(), &drop, impl->device()));
    impl->set_nbytes(size);
}

// Takes the memory of a storage out of it; the capsule gives it up when it goes. The storage is empty then.
py::capsule take(uintptr_t storage) {
    auto* impl = at(storage);
    if (!impl->resizable()) throw py::value_error("the storage cannot be resized");
    auto* held = new c10::DataPtr(impl->set_data_ptr(c10::DataPtr(nullptr, impl->device())));
    impl->set_nbytes(0);
    return py::capsule(held, [](void* data) { delete (c10::DataPtr*)data; });
}

// The owner that `put` was given, if the storage's memory came from there.
py::object owner(uintptr_t storage) {
    const auto& data = at(storage)->data_ptr();
    if (data.get_deleter() != &drop) return py::none();
    return py::reinterpret_borrow<py::object>((PyObject*)data.get_context());
}

}  // namespace

PYBIND11_MODULE(_ds_nvme_swap, m) {
    m.def("put", &put);
    m.def("take", &take);
    m.def("owner", &owner);
}
