#ifndef TOKENWIRE_EXAMPLE_ERROR_H_
#define TOKENWIRE_EXAMPLE_ERROR_H_

#include <string>
#include <vector>

#include <grpcpp/support/status.h>

// Why a call failed, taken from the google.rpc details of its status.
struct Error {
  // Programs branch on it. Empty if the status did not come from the server.
  std::string reason;
  // Paths of the fields at fault.
  std::vector<std::string> fields;
};

Error ErrorOf(const grpc::Status& status);

#endif
