// Random numbers: each device has its own sequence, that of a generator of the host.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

namespace abacus {

const at::Generator& default_generator(c10::DeviceIndex index);
at::Generator new_generator(c10::DeviceIndex index);
at::Generator host_generator(const at::Generator& generator); // the one that draws for it

} // namespace abacus
